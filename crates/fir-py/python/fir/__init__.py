from fir._fir import *
