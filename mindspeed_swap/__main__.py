from mindspeed_swap.cli import main

raise SystemExit(main())
