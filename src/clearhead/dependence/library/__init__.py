"""Every attention model of a library, built tiny and audited."""
