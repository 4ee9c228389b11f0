"""The command line `foreshock`: the entry point (`main`, `command`) and the commands that need only the library."""
