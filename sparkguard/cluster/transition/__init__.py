"""From what runs to what is wanted: looked at, planned, done under lock and fence, and explained when it fails."""
