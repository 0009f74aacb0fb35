"""Reports for people: a plan as text and HTML, the difference between two plans, and explanations of decisions."""
