// Package preferences reads and writes the file of a user's preferences, and lists what each of
// them does.
package preferences

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"gopkg.in/yaml.v3"

	"constellation/engine/plan"
	"constellation/engine/words"
)

// Themes of the console. ThemeAuto follows the terminal.
const (
	ThemeAuto  = "auto"
	ThemeDark  = "dark"
	ThemeLight = "light"
	ThemeMono  = "mono"
)

var themes = []string{ThemeAuto, ThemeDark, ThemeLight, ThemeMono}

// Preferences are a user's preferences. Use Default for the values without a file.
type Preferences struct {
	// Theme is one of the themes.
	Theme string `yaml:"theme" json:"theme"`
	// Guards select the clusters that the console shows read-only until their name is typed.
	Guards []Guard `yaml:"guards" json:"guards"`
	Limits Limits  `yaml:"limits" json:"limits"`
	// UpdateNotice is whether the program looks for a newer release in the workspace's feed.
	UpdateNotice bool `yaml:"updateNotice" json:"updateNotice"`
	// Recent are the contexts that were opened last, the newest first. The program writes them.
	Recent []Recent `yaml:"recent" json:"recent"`
}

// Guard selects clusters. Of Context and Server, one is set.
type Guard struct {
	// Context is the name of a context or of a workspace's cluster, or a pattern: "prod-*".
	Context string `yaml:"context,omitempty" json:"context,omitempty"`
	// Server is the address of an API server.
	Server string `yaml:"server,omitempty" json:"server,omitempty"`
}

// Limits bound the list of clusters.
type Limits struct {
	// Answer is how long a cluster may take to answer.
	Answer Duration `yaml:"answer" json:"answer"`
	// Parallel is the number of clusters that are observed at a time.
	Parallel int `yaml:"parallel" json:"parallel"`
	// Recent is the number of contexts to remember.
	Recent int `yaml:"recent" json:"recent"`
}

// Recent is a context that was opened.
type Recent struct {
	Context string    `yaml:"context" json:"context"`
	Opened  time.Time `yaml:"opened" json:"opened"`
}

// Duration is a time such as 1.5s.
type Duration time.Duration

func (d Duration) String() string { return time.Duration(d).String() }

// MarshalText implements encoding.TextMarshaler.
func (d Duration) MarshalText() ([]byte, error) { return []byte(d.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (d *Duration) UnmarshalText(b []byte) error {
	v, err := time.ParseDuration(string(b))
	if err != nil {
		return errors.New("want a time such as 1.5s")
	}
	*d = Duration(v)
	return nil
}

// Default returns the preferences without a file.
func Default() Preferences {
	return Preferences{Theme: ThemeAuto, Guards: []Guard{}, Recent: []Recent{}, UpdateNotice: true, Limits: Limits{Answer: Duration(1500 * time.Millisecond), Parallel: 32, Recent: 10}}
}

// Field describes a preference.
type Field struct {
	Name  string `json:"name"`
	Value any    `json:"value"`
	// Default is the value without a file.
	Default any    `json:"default"`
	About   string `json:"about"`
}

// Fields lists all preferences with their values.
func (p Preferences) Fields() []Field {
	d := Default()
	return []Field{
		{"theme", p.Theme, d.Theme, "colours of the console: " + words.Or(themes) + ". The variable NO_COLOR has precedence."},
		{"guards", p.Guards, d.Guards, "clusters that the console shows in a coloured frame, read-only until their name is typed. Verbs that change them ask for it on a terminal. Each entry has a context (a name or a pattern such as prod-*) or a server (an address)."},
		{"limits.answer", p.Limits.Answer, d.Limits.Answer, "how long a cluster of the list may take to answer, at most 30s"},
		{"limits.parallel", p.Limits.Parallel, d.Limits.Parallel, "number of clusters that the list queries at a time, at most 256"},
		{"limits.recent", p.Limits.Recent, d.Limits.Recent, "number of opened contexts to remember, at most 100"},
		{"updateNotice", p.UpdateNotice, d.UpdateNotice, "whether commands on a terminal show a newer release of the workspace's feed. The feed is read at most once a day."},
		{"recent", p.Recent, d.Recent, "contexts that were opened last. The program writes this list."},
	}
}

// Guarded reports whether a guard selects a cluster, by its context or name or by its server.
func (p Preferences) Guarded(name, server string) bool {
	return slices.ContainsFunc(p.Guards, func(g Guard) bool {
		if g.Server != "" {
			return strings.EqualFold(strings.TrimRight(g.Server, "/"), strings.TrimRight(server, "/"))
		}
		ok, err := path.Match(flat(g.Context), flat(name))
		return ok || err == nil && g.Context == name
	})
}

// flat replaces slashes, at which path.Match ends a "*": names of EKS and OpenShift have some.
func flat(name string) string { return strings.ReplaceAll(name, "/", "\x00") }

// Path returns the path of the file: in XDG_CONFIG_HOME, or in ~/.config.
func Path(env func(string) string) (string, error) {
	dir := env("XDG_CONFIG_HOME")
	if dir == "" || !filepath.IsAbs(dir) { // the specification ignores relative paths
		home := env("HOME")
		if home == "" {
			return "", errors.New("find preferences: HOME and XDG_CONFIG_HOME are not set")
		}
		dir = filepath.Join(home, ".config")
	}
	return filepath.Join(dir, "constellation", "preferences.yaml"), nil
}

// maxFile bounds the file.
const maxFile = 1 << 20

// Read reads the preferences. Without a file it returns the default ones.
func Read(env func(string) string) (Preferences, error) {
	file, err := Path(env)
	if err != nil {
		return Default(), nil //nolint:nilerr // without a home there is no file
	}
	b, err := read(file)
	if errors.Is(err, fs.ErrNotExist) {
		return Default(), nil
	}
	if err != nil {
		return Preferences{}, &plan.Error{Op: "read preferences " + file, Err: err, Exit: plan.ExitUsage, Remedy: "correct or delete the file"}
	}
	p, err := Parse(b)
	if err != nil {
		return Preferences{}, &plan.Error{Op: "read preferences " + file, Err: err, Exit: plan.ExitUsage, Remedy: "correct the file; `constellation config preferences --defaults` lists what it may contain"}
	}
	return p, nil
}

func read(file string) ([]byte, error) {
	f, err := os.Open(file)
	if err != nil {
		var p *fs.PathError
		if errors.As(err, &p) {
			return nil, p.Err
		}
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err == nil && len(b) > maxFile {
		err = fmt.Errorf("it is larger than %d bytes", maxFile)
	}
	return b, err
}

// Parse reads preferences. Fields that it does not know are errors.
func Parse(b []byte) (Preferences, error) {
	p := Default()
	var doc yaml.Node
	if err := yaml.Unmarshal(b, &doc); err != nil {
		return p, errors.New(strings.TrimPrefix(err.Error(), "yaml: "))
	}
	if len(doc.Content) == 0 {
		return p, nil
	}
	if err := known(doc.Content[0], "", shape); err != nil {
		return p, err
	}
	if err := doc.Decode(&p); err != nil {
		return p, errors.New(strings.TrimPrefix(strings.ReplaceAll(err.Error(), "\n", " "), "yaml: "))
	}
	return p, p.valid()
}

// fields are the fields of a mapping; nil is a value, and the field "[]" is an element of a list.
type fields map[string]fields

var shape = fields{
	"theme": nil, "guards": {"[]": {"context": nil, "server": nil}}, "limits": {"answer": nil, "parallel": nil, "recent": nil},
	"updateNotice": nil,
	"recent":       {"[]": {"context": nil, "opened": nil}},
}

// known returns an error about the first field that is not in of.
func known(n *yaml.Node, at string, of fields) error {
	if of == nil || n.Tag == "!!null" {
		return nil
	}
	if element, ok := of["[]"]; ok {
		if n.Kind != yaml.SequenceNode {
			return fmt.Errorf("line %d: %s: want a list", n.Line, at)
		}
		for i, e := range n.Content {
			if err := known(e, fmt.Sprintf("%s[%d]", at, i), element); err != nil {
				return err
			}
		}
		return nil
	}
	if n.Kind != yaml.MappingNode {
		return fmt.Errorf("line %d: %s: want fields and values", n.Line, cmp.Or(at, "the file"))
	}
	for i := 0; i+1 < len(n.Content); i += 2 {
		name := n.Content[i].Value
		next, ok := of[name]
		full := strings.TrimPrefix(at+"."+name, ".")
		if !ok {
			var names []string
			for k := range of {
				names = append(names, k)
			}
			slices.Sort(names)
			return fmt.Errorf("line %d: unknown field %q, want %s", n.Content[i].Line, full, words.Or(names))
		}
		if err := known(n.Content[i+1], full, next); err != nil {
			return err
		}
	}
	return nil
}

// valid returns an error about the first value that is out of range.
func (p *Preferences) valid() error {
	bound := func(name string, v, low, high int) error {
		if v < low || v > high {
			return fmt.Errorf("%s is %d, want %d to %d", name, v, low, high)
		}
		return nil
	}
	if !slices.Contains(themes, p.Theme) {
		return fmt.Errorf("theme is %q, want %s", p.Theme, words.Or(themes))
	}
	for i, g := range p.Guards {
		if (g.Context == "") == (g.Server == "") {
			return fmt.Errorf("guards[%d]: want either context or server", i)
		}
		if _, err := path.Match(g.Context, ""); err != nil {
			return fmt.Errorf("guards[%d].context: pattern %q is not valid", i, g.Context)
		}
	}
	if a := time.Duration(p.Limits.Answer); a < 100*time.Millisecond || a > 30*time.Second {
		return fmt.Errorf("limits.answer is %s, want 100ms to 30s", a)
	}
	return errors.Join(bound("limits.parallel", p.Limits.Parallel, 1, 256), bound("limits.recent", p.Limits.Recent, 0, 100))
}

// Opened records that a context was opened. All other values and comments of the file are kept.
func Opened(env func(string) string, context string, now time.Time) error {
	file, err := Path(env)
	if err != nil {
		return err
	}
	p, err := Read(env)
	if err != nil {
		return err
	}
	list := []Recent{{context, now.UTC().Truncate(time.Second)}}
	for _, r := range p.Recent {
		if r.Context != context {
			list = append(list, r)
		}
	}
	list = list[:min(len(list), p.Limits.Recent)]
	b, err := read(file)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("read preferences %s: %w", file, err)
	}
	if b, err = withRecent(b, list); err != nil {
		return fmt.Errorf("write preferences %s: %w", file, err)
	}
	return write(file, b)
}

// withRecent replaces the list of recent contexts in a file.
func withRecent(b []byte, list []Recent) ([]byte, error) {
	var doc, value yaml.Node
	if err := yaml.Unmarshal(b, &doc); err != nil {
		return nil, err
	}
	if err := value.Encode(list); err != nil {
		return nil, err
	}
	if len(doc.Content) == 0 || doc.Content[0].Kind != yaml.MappingNode {
		head := doc.HeadComment
		doc = yaml.Node{Kind: yaml.DocumentNode, HeadComment: head, Content: []*yaml.Node{{Kind: yaml.MappingNode}}}
	}
	root := doc.Content[0]
	found := false
	for i := 0; i+1 < len(root.Content); i += 2 {
		if root.Content[i].Value == "recent" {
			root.Content[i+1], found = &value, true
		}
	}
	if !found {
		root.Content = append(root.Content, &yaml.Node{Kind: yaml.ScalarNode, Value: "recent", HeadComment: "# Written by the program."}, &value)
	}
	var out bytes.Buffer
	e := yaml.NewEncoder(&out)
	e.SetIndent(2)
	if err := e.Encode(&doc); err != nil {
		return nil, err
	}
	return out.Bytes(), e.Close()
}

// write replaces the file at once, so that a reader never sees a part of it.
func write(file string, b []byte) (err error) {
	if target, lerr := filepath.EvalSymlinks(file); lerr == nil {
		file = target // a link to a file in another folder is kept
	}
	dir := filepath.Dir(file)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("write preferences: %w", err)
	}
	f, err := os.CreateTemp(dir, ".preferences-*") // mode 0600
	if err != nil {
		return fmt.Errorf("write preferences: %w", err)
	}
	defer func() {
		if err != nil {
			os.Remove(f.Name())
			err = fmt.Errorf("write preferences: %w", err)
		}
	}()
	_, err = f.Write(b)
	if err == nil {
		err = f.Sync()
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Rename(f.Name(), file)
	}
	return err
}
