"""What people see in a browser: the built-in page at `/`, and `/docs`. Files as they are sent; `files` sends them."""
