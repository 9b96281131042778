"""Write the generated pages; not part of the wheel."""
