package backup

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const testID = "backup-20261121070501-1a2b3c4d"

// fill writes a small backup with every feature, without the commit.
func fill(w *Writer) error {
	for _, group := range []string{"a.example.com", "b.example.com"} {
		t, err := w.Type(Type{Group: group, Version: "v1", Resource: "widgets", Kind: "Widget", Namespaced: true}, "")
		if err != nil {
			return err
		}
		if err := t.Mark(); err != nil {
			return err
		}
		var list strings.Builder
		list.WriteString(`{"metadata":{"resourceVersion":"7"},"items":[`)
		for i := range 6 {
			if i > 0 {
				list.WriteByte(',')
			}
			owners := ""
			if i%3 == 2 {
				owners = fmt.Sprintf(`,"ownerReferences":[{"apiVersion":"v1","kind":"X","name":"o","uid":"owner-%d"}]`, i)
			}
			fmt.Fprintf(&list, `{"apiVersion":"%s/v1","kind":"Widget","metadata":{"name":"w%d","namespace":"shop","uid":"%s-%d"%s},"spec":{"n":%d}}`, group, i, group, i, owners, i)
		}
		list.WriteString(`]}`)
		s := NewScanner(strings.NewReader(list.String()))
		for s.Next() {
			if err := t.Add(s.Item()); err != nil {
				return err
			}
		}
		if s.Err() != nil {
			return s.Err()
		}
		if err := t.Close("7"); err != nil {
			return err
		}
	}
	return nil
}

func TestBackupRoundTrip(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "runs")
	w, err := Create(dir, testID)
	if err != nil {
		t.Fatal(err)
	}
	if err := fill(w); err != nil {
		t.Fatal(err)
	}
	m, err := w.Commit(Manifest{Cluster: Cluster{UID: "u", Server: "v1.35.4"}})
	if err != nil {
		t.Fatal(err)
	}
	b, err := Open(dir, testID, Keys{})
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	if err := b.Verify(t.Context(), nil); err != nil {
		t.Error(err)
	}
	want, _ := json.Marshal(m)
	got, _ := json.Marshal(b.Manifest())
	if string(got) != string(want) {
		t.Errorf("manifest\n got %s\nwant %s", got, want)
	}
	var all []string
	for _, typ := range b.Manifest().Types {
		for o, err := range b.Objects(typ) {
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, string(o.JSON)+" "+string(o.Owners))
		}
		for o, err := range b.Owners(typ) {
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, o.Namespace+"/"+o.Name+" "+o.UID+" "+string(o.References))
		}
	}
	var lines []string
	for _, g := range []string{"a.example.com", "b.example.com"} {
		for _, i := range []int{0, 1, 3, 4, 2, 5} {
			owners := ""
			if i%3 == 2 {
				owners = fmt.Sprintf(`[{"apiVersion":"v1","kind":"X","name":"o","uid":"owner-%d"}]`, i)
			}
			lines = append(lines, fmt.Sprintf(`{"apiVersion":"%s/v1","kind":"Widget","metadata":{"name":"w%d","namespace":"shop","uid":"%s-%d"},"spec":{"n":%d}} %s`, g, i, g, i, i, owners))
		}
		for _, i := range []int{2, 5} {
			lines = append(lines, fmt.Sprintf(`shop/w%d %s-%d [{"apiVersion":"v1","kind":"X","name":"o","uid":"owner-%d"}]`, i, g, i, i))
		}
	}
	if got, want := strings.Join(all, "\n"), strings.Join(lines, "\n"); got != want {
		t.Errorf("objects\n got %s\nwant %s", got, want)
	}
	if entries, err := os.ReadDir(w.Path()); err != nil || len(entries) != 3 {
		t.Errorf("%v, %v", entries, err)
	}
}
