package joinservice

import (
	"strings"
	"testing"
	"time"

	"constellation/engine/kubeadm"
)

func TestPrintable(t *testing.T) {
	for _, tt := range []struct{ name, in, want string }{
		{name: "plain text is unchanged", in: "[kubelet-start] Writing kubelet configuration, größer", want: "[kubelet-start] Writing kubelet configuration, größer"},
		{name: "line breaks are escaped", in: "a\nb\r\n", want: `a\u000ab\u000d\u000a`},
		{name: "escape sequences are escaped", in: "\x1b[31mred\x1b]0;title\x07", want: `\u001b[31mred\u001b]0;title\u0007`},
		{name: "right-to-left overrides are escaped", in: "abc\u202edef", want: `abc\u202edef`},
		{name: "zero-width spaces and NUL are escaped", in: "a\u200bb\x00", want: `a\u200bb\u0000`},
		{name: "invalid UTF-8 is replaced", in: "a\xff\xc3", want: `a\xff\xc3`},
		{name: "a tab becomes a space", in: "a\tb", want: "a b"},
		{name: "a real replacement character stays", in: "a\ufffdb", want: "a\ufffdb"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := printable(tt.in, maxText); got != tt.want {
				t.Errorf("got %q, want %q", got, tt.want)
			}
		})
	}
	if got := printable(strings.Repeat("\x1b", 10000), 100); len(got) > 150 || !strings.HasSuffix(got, "bytes more)") {
		t.Errorf("not cut: %q", got)
	}
}

func TestQuietCountsWhatItDrops(t *testing.T) {
	var q quiet
	now := time.Now()
	logged := 0
	for range 1000 {
		if _, ok := q.next(now); ok {
			logged++
		}
	}
	dropped, ok := q.next(now.Add(time.Second))
	if logged != quietPerSecond || !ok || dropped != int64(1000-quietPerSecond) {
		t.Errorf("logged %d, then %v with %d dropped", logged, ok, dropped)
	}
}

func TestTokens(t *testing.T) {
	seen := map[string]bool{}
	for range 1000 {
		s, err := tokenSecret()
		if err != nil {
			t.Fatal(err)
		}
		if len(s) != 16 || strings.Trim(s, tokenAlphabet) != "" || seen[s] {
			t.Fatalf("token secret %q", s)
		}
		seen[s] = true
	}
	for _, n := range []string{"worker-1", "control-plane-0", strings.Repeat("x", 253)} {
		if id := kubeadm.TokenID(n); len(id) != 6 || strings.Trim(id, tokenAlphabet) != "" || id != kubeadm.TokenID(n) {
			t.Errorf("token ID of %s: %q", n, id)
		}
	}
	if kubeadm.TokenID("worker-1") == kubeadm.TokenID("worker-2") {
		t.Error("two nodes share a token")
	}
}
