"""The status document: made by the daemon, shown by the command line, left behind in a file."""

from canaryd.status.document import finding_list, status_document
from canaryd.status.models import StatusDocument

__all__ = ["StatusDocument", "finding_list", "status_document"]
