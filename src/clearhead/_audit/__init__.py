"""How an audit proves: subject (the model, called safely), plan, judge, place, and the forms."""
