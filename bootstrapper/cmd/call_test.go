package main

import "testing"

func TestPrintable(t *testing.T) {
	if got := printable("\x1b[2Jswap \u202eis\u200b on\n"); got != " [2Jswap  is  on " {
		t.Errorf("got %q", got)
	}
}
