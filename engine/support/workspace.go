package support

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"gopkg.in/yaml.v3"

	"constellation/engine/plan"
	"constellation/engine/secretscan"
	"constellation/engine/workspace"
)

// workspaceSecrets returns the secrets that the files of a workspace have. Files that cannot be read have none to offer.
func workspaceSecrets(w *workspace.Workspace) (out []secretscan.Secret) {
	add := func(kind string, values ...[]byte) {
		for _, v := range values {
			out = append(out, secretscan.Secret{Kind: kind, Value: v})
		}
	}
	if path := os.Getenv("CONSTELLATION_BACKUP_IDENTITY"); path != "" {
		add(secretscan.AgeIdentity, ageKeys(path)...)
	}
	if w == nil {
		return out
	}
	if m, err := w.MasterSecret(); err == nil {
		add("master secret", m.Key, m.Salt)
		add("secret derived from the master secret", m.CertifierSecret(), m.BackupSecret(), m.KMSSecret())
	}
	// A damaged file can still have the secrets, so they are searched for in its text, too.
	for _, name := range []string{workspace.StateFile, workspace.InfraFile} {
		b := readSome(w.Path(name))
		for _, m := range initSecretRE.FindAllSubmatch(b, -1) {
			text := m[1]
			add("init secret", text)
			if raw, err := hex.DecodeString(string(text)); err == nil {
				add("init secret", raw)
			}
		}
	}
	for _, m := range masterRE.FindAllSubmatch(readSome(w.Path(workspace.MasterSecretFile)), -1) {
		add("master secret", m[1])
		if raw, err := base64.StdEncoding.DecodeString(string(m[1])); err == nil {
			add("master secret", raw)
		}
	}
	for _, name := range []string{workspace.AuthorityKeyFile, workspace.SigningKeyFile} {
		add("private key of the workspace", readSome(w.Path(name)))
	}
	for _, m := range pullSecretRE.FindAllSubmatch(readSome(w.Path(workspace.ConfigFile)), -1) {
		file := string(m[1])
		if !filepath.IsAbs(file) {
			file = w.Path(file)
		}
		add("login of the registry", registryLogins(readSome(file))...)
	}
	return out
}

var (
	initSecretRE = regexp.MustCompile(`(?m)^\s*initSecret:\s*["']?([0-9a-fA-F]{16,})`)
	pullSecretRE = regexp.MustCompile(`(?m)^\s+pullSecret:\s*["']?([^"'\s#]+)`)
	masterRE     = regexp.MustCompile(`"(?:key|salt)"\s*:\s*"([A-Za-z0-9+/=]{8,})"`)
	ageRE        = regexp.MustCompile(`AGE-SECRET-KEY-[A-Z0-9-]+`)
)

// maxSecretFile bounds a file with secrets, in bytes.
const maxSecretFile = 1 << 20

// readSome returns the beginning of a regular file; nil if it cannot be read.
func readSome(path string) []byte {
	info, err := os.Stat(path)
	if err != nil || !info.Mode().IsRegular() {
		return nil
	}
	f, err := os.Open(path)
	if err != nil {
		return nil
	}
	defer f.Close()
	b, _ := io.ReadAll(io.LimitReader(f, maxSecretFile)) // a part is better than nothing
	return b
}

func ageKeys(path string) [][]byte { return ageRE.FindAll(readSome(path), -1) }

// registryLogins returns the secrets of a file of `docker login`.
func registryLogins(b []byte) (out [][]byte) {
	var config struct {
		Auths map[string]map[string]any `json:"auths"`
	}
	if json.Unmarshal(b, &config) != nil {
		return nil
	}
	for _, a := range config.Auths {
		for _, field := range []string{"auth", "password", "identitytoken", "registrytoken"} {
			text, _ := a[field].(string)
			if text == "" {
				continue
			}
			out = append(out, []byte(text))
			if login, err := base64.StdEncoding.DecodeString(text); err == nil && field == "auth" {
				out = append(out, login)
				if _, password, ok := bytes.Cut(login, []byte(":")); ok {
					out = append(out, password)
				}
			}
		}
	}
	return out
}

// maxRuns is how many runs a bundle has at most, the newest ones.
const maxRuns = 20

// workspace adds files of the workspace, without their secrets, and the records of runs.
func (c *collector) workspace(ctx context.Context) {
	w := c.Workspace
	c.progress("workspace")
	c.listFiles()
	for _, name := range []string{workspace.ConfigFile, workspace.StateFile, workspace.InfraFile, "constellation-nodeversion.yaml"} {
		if w.Has(name) {
			c.yamlFile(name)
		}
	}
	const debugLog = "constellation-debug.log"
	if w.Has(debugLog) {
		c.textFile("workspace/"+debugLog, w.Path(debugLog))
	}
	runs := w.Path(plan.RunsDir)
	entries, err := os.ReadDir(runs)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		c.missing("records of runs", runs, workspace.WithoutPath(err).Error(), "run as the user that owns the folder")
		return
	}
	type run struct {
		name  string
		ended time.Time
	}
	var list []run
	for _, e := range entries {
		info, err := os.Stat(filepath.Join(runs, e.Name(), plan.EventsFile))
		if err == nil && e.IsDir() && info.Mode().IsRegular() {
			list = append(list, run{e.Name(), info.ModTime()})
		}
	}
	slices.SortFunc(list, func(a, b run) int { return b.ended.Compare(a.ended) })
	for i, r := range list {
		switch {
		case ctx.Err() != nil:
			return
		case !c.Since.IsZero() && r.ended.Before(c.Since):
			c.missing(fmt.Sprintf("%d older runs", len(list)-i), runs, "they ended before --since", "")
			return
		case i == maxRuns:
			c.missing(fmt.Sprintf("%d older runs", len(list)-i), runs, fmt.Sprintf("a bundle has the newest %d", maxRuns), "")
			return
		}
		c.progress("run " + r.name)
		for _, name := range []string{workspace.PlanFile, plan.EventsFile} {
			path := filepath.Join(runs, r.name, name)
			if _, err := os.Lstat(path); err == nil {
				c.textFile("runs/"+r.name+"/"+name, path)
			}
		}
	}
}

// listFiles adds names, modes and sizes of files of the workspace, and never their content.
func (c *collector) listFiles() {
	var b bytes.Buffer
	for _, dir := range []string{".", plan.RunsDir} {
		entries, err := os.ReadDir(c.Workspace.Path(dir))
		if err != nil {
			continue // an absent folder has no files; an unreadable one is reported with what it should contain
		}
		for _, e := range entries {
			info, err := e.Info()
			if err != nil || dir == "." && !strings.HasPrefix(strings.TrimPrefix(e.Name(), "."), "constellation") {
				continue // other files are not ours
			}
			fmt.Fprintf(&b, "%s %10d %s %s\n", info.Mode(), info.Size(), info.ModTime().UTC().Format(time.RFC3339), filepath.Join(dir, e.Name()))
		}
	}
	c.add("workspace/files.txt", c.Workspace.Dir(), b.Bytes(), "", nil)
}

// textFile adds the end of a file.
func (c *collector) textFile(path, file string) {
	info, err := os.Stat(file)
	if err == nil && !info.Mode().IsRegular() {
		err = errors.New("it is not a regular file")
	}
	var f *os.File
	if err == nil {
		f, err = os.Open(file)
	}
	if err != nil {
		c.missing(path, file, workspace.WithoutPath(err).Error(), "")
		return
	}
	defer f.Close()
	t := tail{limit: int(c.MaxFile)}
	if _, err := io.Copy(&t, f); err != nil {
		c.missing(path, file, workspace.WithoutPath(err).Error(), "")
		return
	}
	b, cut := t.lines()
	c.add(path, file, b, cut, nil)
}

// yamlFile adds a YAML file of the workspace without comments and without the values of fields that can be secret.
func (c *collector) yamlFile(name string) {
	file := c.Workspace.Path(name)
	info, err := os.Stat(file)
	var b []byte
	switch {
	case err == nil && !info.Mode().IsRegular():
		err = errors.New("it is not a regular file")
	case err == nil && info.Size() > c.MaxFile:
		err = fmt.Errorf("it has %s, limit is %s", workspace.SizeOf(info.Size()), workspace.SizeOf(c.MaxFile))
	case err == nil:
		b, err = os.ReadFile(file)
	}
	var doc yaml.Node
	if err == nil && yaml.Unmarshal(b, &doc) != nil {
		err = errors.New("it is not valid YAML") // the parser's error can quote a secret
	}
	if err != nil {
		c.missing("workspace/"+name, file, workspace.WithoutPath(err).Error(), "")
		return
	}
	left := map[string]int{}
	cleanYAML(&doc, left)
	out, err := yaml.Marshal(&doc)
	if err != nil {
		c.missing("workspace/"+name, file, "it cannot be written as YAML", "")
		return
	}
	c.add("workspace/"+name, file, out, "", left)
}

// leftOut replaces a value that was left out by its place.
const leftOut = "(left out)"

// secretField matches names of fields whose values are secrets. notSecret has fields with names of files and objects.
var (
	secretField = regexp.MustCompile(`(?i)(?:passw(?:or)?d|passphrase|secret|salt|token|private[-_]?key|api[-_]?key|secret[-_]?key|access[-_]?key|key[-_]?data|credentials?)$`)
	notSecret   = []string{"pullSecret", "imagePullSecrets"}
)

// cleanYAML removes comments and values of secret fields.
func cleanYAML(n *yaml.Node, left map[string]int) {
	n.HeadComment, n.LineComment, n.FootComment = "", "", ""
	if n.Kind == yaml.MappingNode {
		for i := 0; i+1 < len(n.Content); i += 2 {
			k, v := n.Content[i], n.Content[i+1]
			if v.Kind == yaml.ScalarNode && v.Tag != "!!bool" && v.Value != "" && secretField.MatchString(k.Value) && !slices.Contains(notSecret, k.Value) {
				v.SetString(leftOut)
				left["field "+k.Value]++
			}
		}
	}
	for _, x := range n.Content {
		cleanYAML(x, left)
	}
}
