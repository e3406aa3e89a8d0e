"""What all experiments do alike: open runs, estimate, write, show."""
