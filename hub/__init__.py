"""
Uploads: lay out what anyone can load, check it, say what is new, send it, and read it back.

`push_folder` (in `push`) does it all; `command` is its command line. Nothing is imported here, so that `--help` answers at once.
"""
