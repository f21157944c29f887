package workspace

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"constellation/engine/attestation"
	"constellation/engine/plan"
	"constellation/engine/version"
)

func digestOf(b byte) []byte { return bytes.Repeat([]byte{b}, 32) }

func hexOf(b byte) string { return hex.EncodeToString(digestOf(b)) }

func demanding(pcrs map[uint32]byte) attestation.Measurements {
	m := attestation.Measurements{}
	for i, b := range pcrs {
		m[i] = attestation.Measurement{Expected: digestOf(b)}
	}
	return m
}

func hopTo(image, services, kubernetes string) HopConfig {
	var h HopConfig
	for to, s := range map[*version.Version]string{&h.Image: image, &h.Services: services, &h.Kubernetes: kubernetes} {
		if s != "" {
			*to = version.MustParse(s)
		}
	}
	return h
}

// layout writes configurations as people do: with any comments, quotes, indentation
// and line ends. Values that a hop replaces stand between « and », the old one, a | and
// the new one.
type layout struct {
	r     *rand.Rand
	roots string
	nl    string
	b     strings.Builder
}

func (l *layout) pick(of ...string) string { return of[l.r.IntN(len(of))] }

func (l *layout) comment() string {
	return l.pick("", "", "", " # why: {a: b}", "   # ключ «", "\t# v1.1.0 \"quoted\" 'too' *star &and", " #", "    # größer: 日本語 €")
}

// lines writes comments and empty lines between two keys.
func (l *layout) lines() {
	for range l.r.IntN(3) {
		l.b.WriteString(l.pick("", "# a line", "  # an indented one: x", "# image: v1.0.0", "   ", "# keep: «this»") + l.nl)
	}
}

func (l *layout) value(from, to string) string {
	v := "«" + from + "|" + to + "»"
	switch l.r.IntN(5) {
	case 0:
		return `"` + v + `"`
	case 1:
		return "'" + v + "'"
	case 2:
		return "!!str " + v
	}
	return v
}

func (l *layout) spaces() string { return l.pick(" ", "  ", "\t", "     ") }

func (l *layout) generate() string {
	l.b.Reset()
	l.nl = l.pick("\n", "\n", "\r\n")
	end := func(s string) { l.b.WriteString(s + l.comment() + l.nl) }
	step := l.pick("  ", "    ", " ")
	if l.r.IntN(4) == 0 {
		l.b.WriteString("\ufeff")
	}
	if l.r.IntN(4) == 0 {
		end("---")
	}
	blocks := []func(){
		func() { end("version: v2") },
		func() { end("name:" + l.spaces() + l.pick("demo", "'demo'", "&n demo")) },
		func() { end(l.pick("image:", `"image":`) + l.spaces() + l.value("v1.0.0", "v1.1.0")) },
		func() { end("microserviceVersion:" + l.spaces() + l.value("1.0.0", "1.1.0")) },
		func() { end("kubernetesVersion:" + l.spaces() + l.value("v1.35.4", "v1.36.3")) },
		func() { end("keepWorkers:" + l.spaces() + "«false|true»") },
		func() { end("provider: {sandbox: {name: demo}}") },
		func() {
			end("nodeGroups:")
			end(step + "control-plane: {role: control-plane, count: 1}")
			end(step + "workers: {role: worker, count: 2}")
		},
		func() {
			end("attestation:")
			l.lines()
			end(step + "tpm2:")
			two, three, four := strings.Repeat(step, 2), strings.Repeat(step, 3), strings.Repeat(step, 4)
			text := func(b byte) string {
				v := hexOf(b)
				if l.r.IntN(2) == 0 {
					v = strings.ToUpper(v)
				}
				return l.pick(`"`, "'")[:1] + v
			}
			quoted := func(from, to byte) string {
				f := text(from)
				return f[:1] + "«" + f[1:] + "|" + hexOf(to) + "»" + f[:1]
			}
			if l.r.IntN(3) == 0 {
				end(fmt.Sprintf("%smeasurements: {4: {expected: %s}, 9: { warnOnly: true, expected: %s }, 11: {expected: \"%s\",},}", two, quoted(1, 2), quoted(3, 4), hexOf(5)))
			} else {
				end(two + "measurements:")
				l.lines()
				end(three + l.pick("4:", `"4":`, "'4':", "4 :"))
				end(four + "expected: " + quoted(1, 2))
				end(fmt.Sprintf("%s9: {expected: %s, warnOnly: true}", three, quoted(3, 4)))
				l.lines()
				end(three + "11:")
				end(four + "warnOnly: false")
				end(fmt.Sprintf("%sexpected: %s", four, hexOf(5)))
			}
			l.b.WriteString(two + "trustRoots: |" + l.nl)
			for line := range strings.Lines(l.roots) {
				l.b.WriteString(three + strings.TrimSuffix(line, "\n") + l.nl)
			}
		},
	}
	l.r.Shuffle(len(blocks), func(i, j int) { blocks[i], blocks[j] = blocks[j], blocks[i] })
	for _, f := range blocks {
		l.lines()
		f()
	}
	l.lines()
	return l.b.String()
}

// fill puts the old or the new values into a layout.
func fillIn(s string, n int) string {
	var out strings.Builder
	for {
		before, rest, found := strings.Cut(s, "«")
		out.WriteString(before)
		if !found {
			return out.String()
		}
		value, after, found := strings.Cut(rest, "»")
		from, to, two := strings.Cut(value, "|")
		if !found || !two || strings.Contains(value, "\n") {
			out.WriteString("«") // of a comment
			s = rest
			continue
		}
		out.WriteString([]string{from, to}[n])
		s = after
	}
}

func TestEditTouchesOnlyValuesInAnyLayout(t *testing.T) {
	h := hopTo("v1.1.0", "v1.1.0", "v1.36.3")
	h.KeepWorkers = true
	h.Measurements = demanding(map[uint32]byte{4: 2, 9: 4, 11: 5})
	h.Measurements[9] = attestation.Measurement{Expected: digestOf(4), WarnOnly: true}
	roots := testRoot(t)
	for seed := range uint64(2000) {
		l := &layout{r: rand.New(rand.NewPCG(seed, 1)), roots: roots}
		text := l.generate()
		before, want := fillIn(text, 0), fillIn(text, 1)
		if _, err := ParseConfig([]byte(before)); err != nil {
			t.Fatalf("seed %d: the layout is no configuration: %v\n%s", seed, err, before)
		}
		got, fields, err := EditConfig([]byte(before), h)
		if err != nil {
			t.Fatalf("seed %d: %v\n%s", seed, err, before)
		}
		if d := cmp.Diff(want, string(got)); d != "" {
			t.Fatalf("seed %d (-want +got):\n%s", seed, d)
		}
		if len(fields) != 6 {
			t.Fatalf("seed %d: changes %v", seed, fields)
		}
		again, fields, err := EditConfig(got, h)
		if err != nil || len(fields) > 0 || !bytes.Equal(again, got) {
			t.Fatalf("seed %d: a second time: %v, %v", seed, fields, err)
		}
	}
}

// flowing is a configuration on few lines, as another program may write it.
func flowing(t testing.TB, format string) string {
	return fmt.Sprintf(format, strings.ReplaceAll(testRoot(t), "\n", `\n`))
}

const (
	blockMeasurements = `version: v2
name: demo
image: v1.0.0
microserviceVersion: v1.0.0
kubernetesVersion: v1.35.4 # keep
provider: {sandbox: {name: demo}}
nodeGroups: {control-plane: {role: control-plane, count: 1}}
attestation:
    tpm2:
        trustRoots: "%s"
        measurements:
            4:
                expected: "0101010101010101010101010101010101010101010101010101010101010101"
                # the kernel
            9: # it
                expected: "0303030303030303030303030303030303030303030303030303030303030303"
                warnOnly: false # for now`
	flowMeasurements = `{"version": "v2", "name": "demo", "image": "v1.0.0", "microserviceVersion": "v1.0.0", "kubernetesVersion": "v1.35.4",
 "provider": {"sandbox": {"name": "demo"}}, "nodeGroups": {"control-plane": {"role": "control-plane", "count": 1}},
 "attestation": {"tpm2": {"trustRoots": "%s", "measurements": {
   "4": {"expected": "0101010101010101010101010101010101010101010101010101010101010101"},
   "9": {"expected": "0303030303030303030303030303030303030303030303030303030303030303", "warnOnly": false}}}}}
`
)

func TestRegistersComeAndGo(t *testing.T) {
	for _, tt := range []struct {
		name, text string
		to         map[uint32]byte
		old, new   string
	}{
		{
			name: "one is added to a block at the end of a file without a line end", text: blockMeasurements,
			to:  map[uint32]byte{4: 1, 9: 3, 11: 5},
			old: "warnOnly: false # for now", new: "warnOnly: false # for now\n            11:\n                expected: \"" + hexOf(5) + "\"\n                warnOnly: false",
		},
		{
			name: "the first of a block is removed", text: blockMeasurements,
			to:  map[uint32]byte{9: 3},
			old: "            4:\n                expected: \"" + hexOf(1) + "\"\n",
		},
		{
			name: "the last of a block is removed", text: blockMeasurements,
			to:  map[uint32]byte{4: 1},
			old: "            9: # it\n                expected: \"" + hexOf(3) + "\"\n                warnOnly: false # for now",
		},
		{
			name: "two are added to JSON", text: flowMeasurements,
			to:  map[uint32]byte{4: 1, 9: 3, 11: 5, 12: 6},
			old: `"warnOnly": false}`, new: `"warnOnly": false}, "11": {"expected": "` + hexOf(5) + `", "warnOnly": false}, "12": {"expected": "` + hexOf(6) + `", "warnOnly": false}`,
		},
		{
			name: "the first of JSON is removed", text: flowMeasurements,
			to:  map[uint32]byte{9: 3},
			old: `"4": {"expected": "` + hexOf(1) + "\"},\n   ", new: "\n   ",
		},
		{
			name: "the last of JSON is removed", text: flowMeasurements,
			to:  map[uint32]byte{4: 1},
			old: ",\n   \"9\": {\"expected\": \"" + hexOf(3) + `", "warnOnly": false}`,
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			text := flowing(t, tt.text)
			if !strings.Contains(text, tt.old) {
				t.Fatalf("the file has no %q", tt.old)
			}
			h := HopConfig{Measurements: demanding(tt.to)}
			got, _, err := EditConfig([]byte(text), h)
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(strings.Replace(text, tt.old, tt.new, 1), string(got)); d != "" {
				t.Errorf("edited (-want +got):\n%s", d)
			}
		})
	}
}

func TestKeepWorkersIsAddedWhereItBelongs(t *testing.T) {
	h := HopConfig{KeepWorkers: true}
	for _, tt := range []struct{ name, text, old, new string }{
		{name: "after the version of Kubernetes", text: flowing(t, blockMeasurements), old: "v1.35.4 # keep\n", new: "v1.35.4 # keep\nkeepWorkers: true\n"},
		{name: "after the comment that shows it", text: testConfig(t), old: "# keepWorkers: false\n", new: "# keepWorkers: false\nkeepWorkers: true\n"},
		{name: "with the line ends of the file", text: strings.ReplaceAll(flowing(t, blockMeasurements), "\n", "\r\n"), old: "v1.35.4 # keep\r\n", new: "v1.35.4 # keep\r\nkeepWorkers: true\r\n"},
		{name: "in line", text: flowing(t, flowMeasurements), old: `"v1.35.4",`, new: `"v1.35.4", "keepWorkers": true,`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, fields, err := EditConfig([]byte(tt.text), h)
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(strings.Replace(tt.text, tt.old, tt.new, 1), string(got)); d != "" {
				t.Errorf("edited (-want +got):\n%s", d)
			}
			if d := cmp.Diff([]FieldChange{{"keepWorkers", "false", "true"}}, fields); d != "" {
				t.Errorf("changes (-want +got):\n%s", d)
			}
		})
	}
}

func TestAnchorsAreFollowedOrLeft(t *testing.T) {
	tied := strings.NewReplacer("image: v1.0.0", "image: &r v1.0.0", "microserviceVersion: v1.0.0", "microserviceVersion: *r").Replace(flowing(t, blockMeasurements))
	for _, tt := range []struct {
		name     string
		h        HopConfig
		old, new string
	}{
		{name: "both change", h: hopTo("v1.1.0", "v1.1.0", ""), old: "&r v1.0.0", new: "&r v1.1.0"},
		{name: "the one that refers", h: hopTo("", "v1.1.0", ""), old: "microserviceVersion: *r", new: "microserviceVersion: v1.1.0"},
		{name: "the one that is referred to", h: hopTo("v1.1.0", "", ""), old: "&r v1.0.0\nmicroserviceVersion: *r", new: "&r v1.1.0\nmicroserviceVersion: v1.0.0"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, _, err := EditConfig([]byte(tied), tt.h)
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(strings.Replace(tied, tt.old, tt.new, 1), string(got)); d != "" {
				t.Errorf("edited (-want +got):\n%s", d)
			}
		})
	}
	t.Run("one that something else hangs on is refused", func(t *testing.T) {
		text := strings.NewReplacer("name: demo", "name: &r v1-0-0", "image: v1.0.0", "image: &i v1.0.0", "count: 1}}", "count: 1}}\nreleases: {feed: *i}").Replace(flowing(t, blockMeasurements))
		_, _, err := EditConfig([]byte(text), hopTo("v1.1.0", "", ""))
		if !errors.Is(err, errTied) || plan.Remedy(err) != "write by hand: image: v1.1.0" {
			t.Errorf("got %v (remedy %q)", err, plan.Remedy(err))
		}
	})
}

func TestUpdateConfigKeepsModeAndLinkAndOthersChanges(t *testing.T) {
	dir := t.TempDir()
	w, err := OpenWorkspace(dir)
	if err != nil {
		t.Fatal(err)
	}
	real := filepath.Join(t.TempDir(), "shared.yaml")
	if err := os.WriteFile(real, []byte("a"), 0o640); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(real, w.Path(ConfigFile)); err != nil {
		t.Fatal(err)
	}
	if err := w.UpdateConfig([]byte("a"), []byte("b")); err != nil {
		t.Fatal(err)
	}
	info, err := os.Lstat(w.Path(ConfigFile))
	if err != nil || info.Mode()&os.ModeSymlink == 0 {
		t.Errorf("the link became %v, %v", info, err)
	}
	info, err = os.Stat(real)
	if err != nil || info.Mode().Perm() != 0o640 {
		t.Errorf("the file has %v, %v", info, err)
	}
	err = w.UpdateConfig([]byte("a"), []byte("c"))
	if err == nil || !strings.Contains(err.Error(), "somebody changed it meanwhile") || plan.ExitCode(err) != plan.ExitUsage {
		t.Errorf("a file that changed: %v", err)
	}
	if b, _ := os.ReadFile(real); string(b) != "b" {
		t.Errorf("the file holds %q", b)
	}
	if err := os.Chmod(real, 0o444); err != nil {
		t.Fatal(err)
	}
	if err := w.UpdateConfig([]byte("b"), []byte("c")); err == nil || plan.Remedy(err) == "" {
		t.Errorf("a read-only file: %v", err)
	}
}

func FuzzEditConfig(f *testing.F) {
	f.Add(testConfig(f))
	f.Add(flowing(f, blockMeasurements))
	f.Add(flowing(f, flowMeasurements))
	l := &layout{roots: testRoot(f)}
	for seed := range uint64(20) {
		l.r = rand.New(rand.NewPCG(seed, 2))
		f.Add(fillIn(l.generate(), 0))
	}
	h := hopTo("v1.2.0", "v1.3.0", "v1.37.1")
	h.KeepWorkers = true
	h.Measurements = demanding(map[uint32]byte{4: 7, 12: 8})
	f.Fuzz(func(t *testing.T, text string) {
		if _, err := ParseConfig([]byte(text)); err != nil {
			return
		}
		got, fields, err := EditConfig([]byte(text), h)
		if err != nil {
			if !errors.Is(err, errTied) && plan.Remedy(err) == "" {
				t.Errorf("%q: %v", text, err)
			}
			return
		}
		c, err := ParseConfig(got)
		if err != nil || !c.Image.Equal(h.Image) || !c.Kubernetes.Equal(h.Kubernetes) || !c.KeepWorkers || !c.Attestation.TPM2.Measurements.Equal(h.Measurements) {
			t.Errorf("%q became %q: %v, %v", text, got, fields, err)
		}
		if a, b := strings.Count(text, "#"), strings.Count(string(got), "#"); b > a {
			t.Errorf("%q became %q: a comment too many", text, got)
		}
	})
}
