"""Lightning callbacks of masw_lightning: prediction, reports, progress, export. They import it, never the reverse."""
