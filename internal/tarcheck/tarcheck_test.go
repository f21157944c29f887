package tarcheck

import (
	"archive/tar"
	"errors"
	"strings"
	"testing"
	"testing/iotest"
)

func TestEntry(t *testing.T) {
	n := Names{}
	for _, tt := range []struct {
		name string
		h    tar.Header
		want string // empty: accepted
	}{
		{name: "a", want: ""},
		{name: "a", want: ""},
		{name: "A", want: `differs from "a" in case only`},
		{name: "ä", want: ""},
		{name: "Ä", want: "in case only"},
		{name: "gnu", h: tar.Header{Typeflag: tar.TypeGNUSparse}, want: "is a sparse file"},
		{name: "pax", h: tar.Header{PAXRecords: map[string]string{"GNU.sparse.major": "1"}}, want: "is a sparse file"},
		{name: "comment", h: tar.Header{PAXRecords: map[string]string{"comment": "long"}}, want: ""},
	} {
		if err := n.Entry(&tt.h, tt.name); (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %q", tt.name, err, tt.want)
		}
	}
}

func TestEnd(t *testing.T) {
	if err := End(strings.NewReader(strings.Repeat("\x00", 10_000))); err != nil {
		t.Errorf("padding: %v", err)
	}
	if err := End(strings.NewReader(strings.Repeat("\x00", 10_000) + "x")); err == nil {
		t.Error("data after the padding are accepted")
	}
	damaged := errors.New("damaged")
	if err := End(iotest.ErrReader(damaged)); !errors.Is(err, damaged) {
		t.Errorf("a reader that fails: %v", err)
	}
}
