"""Long polls on advice and alerts: many waiters, few queries."""
