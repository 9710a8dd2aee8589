"""The command line, files, signals, the device."""
