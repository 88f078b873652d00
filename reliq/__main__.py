"""`python -m reliq` is the `reliq` command."""

from reliq.cli.app import main

if __name__ == "__main__":
    main()
