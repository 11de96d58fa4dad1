# Images with jaxcgx and its recipes. Nobody has built them, or run `make test-image`, which tries their steps. The
# compilers are the distribution's newest.
#
#     docker build --target cpu -t jaxcgx:cpu .
#     docker build --target cuda -t jaxcgx:cuda .
#     docker run --gpus all --shm-size=1g -v $PWD/runs:/jaxcgx/runs jaxcgx:cuda \
#         --config=recipes/configs/digits/mlp.py --compression=dgc

FROM python:3.12-slim AS cpu-wheel
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ make
COPY . /jaxcgx
RUN pip wheel --no-deps --wheel-dir /wheel /jaxcgx -Ccmake.define.JAXCGX_CUDA=OFF

# Ubuntu 24.04 has Python 3.12, too.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04 AS cuda-wheel
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ make python3-dev python3-pip
COPY . /jaxcgx
RUN pip wheel --no-deps --wheel-dir /wheel /jaxcgx -Ccmake.define.JAXCGX_CUDA=ON

FROM python:3.12-slim AS recipes
WORKDIR /jaxcgx
COPY recipes recipes
ENTRYPOINT ["python", "recipes/train.py"]

FROM recipes AS cpu
RUN --mount=from=cpu-wheel,source=/wheel,target=/wheel \
    pip install --no-cache-dir "$(echo /wheel/*.whl)[recipes,ray]"

# CUDA's libraries come with JAX. The driver is the host's, 580 or later.
FROM recipes AS cuda
RUN --mount=from=cuda-wheel,source=/wheel,target=/wheel \
    pip install --no-cache-dir "$(echo /wheel/*.whl)[cuda13,recipes,ray]"
