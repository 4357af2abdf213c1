"""``python -m millrace`` is the command ``millrace``."""

import sys

try:
    from millrace.cli import main

    if __name__ == "__main__":
        main()
except KeyboardInterrupt:  # while the modules of the command line itself are imported
    sys.exit(130)
