"""What needs the standard library alone: anyone may import it, the doctor on a machine without torch as well."""
