"""Model files, the operators they call, and what a checkpoint's config says. Knows no pages, no requests, no HTTP."""
