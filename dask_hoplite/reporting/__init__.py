"""What a report shows, and how it is drawn."""
