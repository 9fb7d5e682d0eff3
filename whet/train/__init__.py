
from whet.calling import make_called

make_called(__name__)
