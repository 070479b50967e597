"""Other libraries' classes beside ours, from checkouts: `make test-peers PEERS=/path`."""
