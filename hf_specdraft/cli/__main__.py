"""`python -m hf_specdraft.cli`: for launchers that take a module, such as accelerate's."""

from . import main

main()
