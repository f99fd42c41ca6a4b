"""Messages between ranks that share one GPU: mailboxes in its memory, opened by CUDA IPC."""
