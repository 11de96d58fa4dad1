"""The command line: python -m jaxcgx COMMAND."""
import argparse
import sys


def doctor(_):
    from jaxcgx.report import doctor

    report = doctor.examine()
    print(report)
    return 1 if report.problems else 0


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m jaxcgx", description="Compressed gradient exchange for JAX.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for run, words in ((doctor, "say what this installation has, and what is wrong with it"),):
        commands.add_parser(run.__name__, help=words, description=words.capitalize() + ".").set_defaults(run=run)
    options = parser.parse_args(arguments)
    return options.run(options)


if __name__ == "__main__":
    sys.exit(main())
