"""One file a tab: each defines ``TAB``. Modules without it are helpers of their tabs."""
