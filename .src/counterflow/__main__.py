"""`python -m counterflow COMMAND` and `torchrun ... -m counterflow COMMAND`: the `counterflow` command."""

import sys

from counterflow.launch.cli import main

if __name__ == "__main__":
    sys.exit(main())
