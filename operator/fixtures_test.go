package operator

import "time"

var testNow = time.Date(2030, 1, 1, 12, 0, 0, 0, time.UTC)
