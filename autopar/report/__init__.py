"""A plan for people: its page as text and HTML, what differs between two, and why each decision was made."""
