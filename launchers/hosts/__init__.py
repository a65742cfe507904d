"""Looking at hosts before work is given to them.

`looking` asks each host about itself and compares the answers, `ports` tries who can talk to whom, and `collective`
runs a small all-reduce over all of them. What runs on the hosts is `probe` and `collective_probe`: sent as text,
nothing is installed. All of it works over any `Transport`.
"""
