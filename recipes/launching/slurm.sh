#!/bin/bash
# sbatch recipes/launching/slurm.sh --config=recipes/configs/cifar/resnet20.py --compression=dgc
#
# One task per GPU: JAX gives each task the GPU with the number that the task has on its node. The folder of the
# repository, its .venv and runs/ must be on a file system that all nodes share. A requeued job continues from the last
# checkpoint.
#SBATCH --job-name=jaxcgx
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --requeue
#SBATCH --open-mode=append

# Since Slurm 22.05, srun doesn't inherit --cpus-per-task from sbatch.
srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" .venv/bin/python recipes/train.py --launch=distributed "$@"
