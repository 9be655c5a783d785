"""Groups of several ranks that take local steps together: HSDP in LocalSGD or DiLoCo."""
