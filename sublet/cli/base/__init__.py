"""What all commands share: options, exit codes, output, logs, and loading no more than one of them."""
