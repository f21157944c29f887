package simulated

import (
	"bufio"
	"bytes"
	"io"
	"net/url"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// testOutput is the output of container c of a pod on a machine of its own.
func testOutput(t *testing.T) *output {
	t.Helper()
	c := &computer{dir: t.TempDir()}
	if err := os.MkdirAll(filepath.Dir(c.logFile(&corev1.Pod{}, "c", 0)), 0o700); err != nil {
		t.Fatal(err)
	}
	o, err := newOutput(c, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p"}}, "c")
	if err != nil {
		t.Fatal(err)
	}
	return o
}

func say(t *testing.T, o *output, text string) {
	t.Helper()
	if _, err := io.WriteString(o, text); err != nil {
		t.Fatal(err)
	}
}

func TestLogsAreSentAsTheyAreAskedFor(t *testing.T) {
	o := testOutput(t)
	say(t, o, "one\ntw")
	say(t, o, "o\n")
	between := time.Now()
	say(t, o, "three\nno end")
	o.end()
	for _, tt := range []struct {
		name string
		want corev1.PodLogOptions
		says string
	}{
		{name: "all of it", want: corev1.PodLogOptions{}, says: "one\ntwo\nthree\nno end\n"},
		{name: "the last lines", want: corev1.PodLogOptions{TailLines: new(int64(2))}, says: "three\nno end\n"},
		{name: "more last lines than there are", want: corev1.PodLogOptions{TailLines: new(int64(9))}, says: "one\ntwo\nthree\nno end\n"},
		{name: "none of the last lines", want: corev1.PodLogOptions{TailLines: new(int64(0))}, says: ""},
		{name: "since a time", want: corev1.PodLogOptions{SinceTime: new(metav1.NewTime(between))}, says: "three\nno end\n"},
		{name: "since some seconds ago", want: corev1.PodLogOptions{SinceSeconds: new(int64(3600))}, says: "one\ntwo\nthree\nno end\n"},
		{name: "some bytes", want: corev1.PodLogOptions{LimitBytes: new(int64(5))}, says: "one\nt"},
		{name: "followed, of a process that is gone", want: corev1.PodLogOptions{Follow: true}, says: "one\ntwo\nthree\nno end\n"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var out bytes.Buffer
			if err := o.send(t.Context(), &out, tt.want, func() {}); err != nil || out.String() != tt.says {
				t.Errorf("sent %q and returned %v, want %q", out.String(), err, tt.says)
			}
		})
	}
	t.Run("with times", func(t *testing.T) {
		var out bytes.Buffer
		if err := o.send(t.Context(), &out, corev1.PodLogOptions{Timestamps: true, TailLines: new(int64(1))}, func() {}); err != nil {
			t.Fatal(err)
		}
		stamp, text, _ := strings.Cut(out.String(), " ")
		if at, err := time.Parse(time.RFC3339Nano, stamp); err != nil || at.Before(between.Truncate(0)) || text != "no end\n" {
			t.Errorf("sent %q", out.String())
		}
	})
}

func TestLogsAreFollowedUntilTheProcessEnds(t *testing.T) {
	o := testOutput(t)
	say(t, o, "before\n")
	r, w := io.Pipe()
	ended := make(chan error, 1)
	go func() {
		ended <- o.send(t.Context(), w, corev1.PodLogOptions{Follow: true}, func() {})
		w.Close()
	}()
	in := bufio.NewScanner(r)
	for _, want := range []string{"before", "after", "and after that"} {
		if want != "before" {
			say(t, o, want+"\n")
		}
		if !in.Scan() || in.Text() != want {
			t.Fatalf("followed %q, want %q", in.Text(), want)
		}
	}
	o.end()
	if in.Scan() {
		t.Errorf("followed %q after the end", in.Text())
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func TestEachStartOfAContainerHasAnOutputOfItsOwn(t *testing.T) {
	c := &computer{dir: t.TempDir()}
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p"}}
	if err := os.MkdirAll(filepath.Dir(c.logFile(pod, "c", 0)), 0o700); err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for range 3 {
		o, err := newOutput(c, pod, "c")
		if err != nil {
			t.Fatal(err)
		}
		o.end()
		if seen[o.id] || seen[o.path] {
			t.Fatalf("output %s in %s is there twice", o.id, o.path)
		}
		seen[o.id], seen[o.path] = true, true
	}
}

func TestLongLinesAreBounded(t *testing.T) {
	o := testOutput(t)
	say(t, o, strings.Repeat("x", 2*longestLine+1)+"\n")
	o.end()
	var out bytes.Buffer
	if err := o.send(t.Context(), &out, corev1.PodLogOptions{}, func() {}); err != nil {
		t.Fatal(err)
	}
	var lengths []int
	for line := range strings.Lines(out.String()) {
		lengths = append(lengths, len(line)-1)
	}
	if len(lengths) != 3 || lengths[0] != longestLine || lengths[1] != longestLine || lengths[2] != 1 {
		t.Errorf("lines are %v bytes long", lengths)
	}
}

func TestRequestsForLogsAreRead(t *testing.T) {
	at := time.Date(2026, 11, 21, 7, 5, 1, 0, time.UTC)
	for _, tt := range []struct {
		query string
		want  corev1.PodLogOptions
		err   string
	}{
		{query: "", want: corev1.PodLogOptions{}, err: ""},
		{
			query: "follow=true&timestamps=true&sinceTime=2026-11-21T07%3A05%3A01Z&tailLines=5&limitBytes=0&previous=false",
			want:  corev1.PodLogOptions{Follow: true, Timestamps: true, SinceTime: new(metav1.NewTime(at)), TailLines: new(int64(5)), LimitBytes: new(int64(0))},
			err:   "",
		},
		{query: "sinceSeconds=60", want: corev1.PodLogOptions{SinceSeconds: new(int64(60))}, err: ""},
		{query: "follow=perhaps", want: corev1.PodLogOptions{}, err: `follow: want true or false, not "perhaps"`},
		{query: "tailLines=-1", want: corev1.PodLogOptions{}, err: `tailLines: want a number, not "-1"`},
		{query: "sinceTime=today", want: corev1.PodLogOptions{}, err: `sinceTime: parsing time "today" as "2006-01-02T15:04:05Z07:00": cannot parse "today" as "2006"`},
	} {
		q, err := url.ParseQuery(tt.query)
		if err != nil {
			t.Fatal(err)
		}
		got, err := logOptions(q)
		text := ""
		if err != nil {
			text, got = err.Error(), corev1.PodLogOptions{}
		}
		if !reflect.DeepEqual(got, tt.want) || text != tt.err {
			t.Errorf("%q: %+v and %q, want %+v and %q", tt.query, got, text, tt.want, tt.err)
		}
	}
}
