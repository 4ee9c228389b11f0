"""The command `foreshock`: its frame (`main`, `command`) and the commands that need nothing but the library."""
