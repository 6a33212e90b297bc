"""``python -m ms_spec`` is ``ms-spec``."""

from ms_spec.cli import main

if __name__ == "__main__":
    main()
