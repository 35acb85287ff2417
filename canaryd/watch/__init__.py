"""The pure core: ledger, suspects, findings and pace."""
