"""Documents as they are stored: cleaned, cut where too long, masked."""
