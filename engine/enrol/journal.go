package enrol

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// journalVersion is the version of the format.
const journalVersion = 1

// State is how far an enrolment is.
type State string

// States of a journal.
const (
	Installing State = "installing"
	Installed  State = "installed"
	Removing   State = "removing"
)

// Journal is what a machine keeps about its enrolment.
type Journal struct {
	Version int `json:"version"`
	// Cluster is the unique ID of the cluster, ClusterName its name, Machine the name of the machine there.
	Cluster     string `json:"cluster"`
	ClusterName string `json:"clusterName,omitempty"`
	Machine     string `json:"machine"`
	Release     string `json:"release"`
	State       State  `json:"state"`
	// Begun is when the enrolment began, Changed the last change.
	Begun   time.Time `json:"begun"`
	Changed time.Time `json:"changed"`

	Files []fileRecord `json:"files"`
	// Folders were made for files, parents first.
	Folders []string `json:"folders,omitempty"`
	// Trees did not exist before.
	Trees []string `json:"trees,omitempty"`
	// Packages were installed by the enrolment.
	Packages []string     `json:"packages,omitempty"`
	Units    []unitRecord `json:"units,omitempty"`
}

// fileRecord is a file that the enrolment placed.
type fileRecord struct {
	Path string `json:"path"`
	// Before is the previous file. Copy is the name of its copy; empty if there was no file.
	Before entry  `json:"before"`
	Copy   string `json:"copy,omitempty"`
	// After is what the enrolment placed.
	After entry `json:"after"`
}

// unitRecord is a unit as it was before.
type unitRecord struct {
	Name string `json:"name"`
	// Existed is whether systemd knew it.
	Existed bool `json:"existed,omitempty"`
	Enabled bool `json:"enabled,omitempty"`
	Active  bool `json:"active,omitempty"`
}

// kind is the kind of a directory entry.
type kind string

const (
	kindAbsent kind = "absent"
	kindFile   kind = "file"
	kindLink   kind = "link"
	kindFolder kind = "folder"
	kindOther  kind = "other"
)

// entry is the state of a path: a file, a link, a folder, or nothing.
type entry struct {
	Kind kind `json:"kind"`
	// Mode is in octal digits, Owner is UID:GID.
	Mode   string `json:"mode,omitempty"`
	Owner  string `json:"owner,omitempty"`
	Digest string `json:"digest,omitempty"` // of a file, SHA-256
	Target string `json:"target,omitempty"` // of a link
}

var (
	modeRE   = regexp.MustCompile(`^[0-7]{1,4}$`)
	ownerRE  = regexp.MustCompile(`^[0-9]{1,10}:[0-9]{1,10}$`)
	digestRE = regexp.MustCompile(`^[0-9a-f]{64}$`)
	textRE   = regexp.MustCompile(`^[ -~]{1,200}$`)
)

func (e entry) validate() error {
	switch e.Kind {
	case kindAbsent:
		return nil
	case kindFile:
		if modeRE.MatchString(e.Mode) && ownerRE.MatchString(e.Owner) && digestRE.MatchString(e.Digest) {
			return nil
		}
	case kindLink:
		if textRE.MatchString(e.Target) {
			return nil
		}
	case kindFolder:
		if modeRE.MatchString(e.Mode) && ownerRE.MatchString(e.Owner) {
			return nil
		}
	case kindOther:
		return nil
	}
	return fmt.Errorf("%q is no state of a file", fmt.Sprint(e))
}

// parseJournal reads a journal strictly: scripts that root runs on the machine get its paths and names.
func parseJournal(b []byte) (*Journal, error) {
	var version struct{ Version int }
	if err := json.Unmarshal(b, &version); err != nil {
		return nil, fmt.Errorf("it is no JSON: %w", err)
	}
	if version.Version != journalVersion {
		return nil, fmt.Errorf("its version is %d, want %d", version.Version, journalVersion)
	}
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	var j Journal
	if err := d.Decode(&j); err != nil {
		return nil, err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return nil, errors.New("text follows it")
	}
	for _, s := range []string{j.Cluster, j.Machine, j.Release} {
		if !textRE.MatchString(s) {
			return nil, fmt.Errorf("it has the name %q", s)
		}
	}
	if j.ClusterName != "" && !textRE.MatchString(j.ClusterName) {
		return nil, fmt.Errorf("it has the name %q", j.ClusterName)
	}
	if !slices.Contains([]State{Installing, Installed, Removing}, j.State) {
		return nil, fmt.Errorf("%q is no state", j.State)
	}
	for _, f := range j.Files {
		if !validPath(f.Path) {
			return nil, fmt.Errorf("%q is no path", f.Path)
		}
		if _, err := strconv.Atoi(f.Copy); err != nil && f.Copy != "" {
			return nil, fmt.Errorf("%q is no copy", f.Copy)
		}
		if err := errors.Join(f.Before.validate(), f.After.validate()); err != nil {
			return nil, fmt.Errorf("%s: %w", f.Path, err)
		}
		if (f.Copy == "") != (f.Before.Kind == kindAbsent) {
			return nil, fmt.Errorf("%s has the copy %q", f.Path, f.Copy)
		}
	}
	for _, p := range slices.Concat(j.Folders, j.Trees) {
		if !validPath(p) || strings.Count(p, "/") < 2 {
			return nil, fmt.Errorf("%q is no folder", p)
		}
	}
	for _, p := range j.Packages {
		if !nameRE.MatchString(p) {
			return nil, fmt.Errorf("%q is no package", p)
		}
	}
	for _, u := range j.Units {
		if !nameRE.MatchString(u.Name) {
			return nil, fmt.Errorf("%q is no unit", u.Name)
		}
	}
	return &j, nil
}

func (j *Journal) marshal() ([]byte, error) {
	b, err := json.MarshalIndent(j, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("write the journal: %w", err)
	}
	return append(b, '\n'), nil
}

func (j *Journal) file(p string) *fileRecord {
	for i := range j.Files {
		if j.Files[i].Path == p {
			return &j.Files[i]
		}
	}
	return nil
}

// extend adds what will be changed for a Spec to the journal. A record that exists keeps its previous file.
func (j *Journal) extend(s *Spec, wants []entry, d *difference) {
	o := d.o
	for _, i := range d.files {
		f := s.Files[i]
		if r := j.file(f.Path); r != nil {
			r.After = wants[i]
			continue
		}
		r := fileRecord{Path: f.Path, Before: o.files[i], After: wants[i]}
		if r.Before.Kind != kindAbsent {
			r.Copy = strconv.Itoa(len(j.Files) + 1)
		}
		j.Files = append(j.Files, r)
		// Only the parents of a file that will be placed are made.
		for _, dir := range parents(f.Path) {
			if o.folders[dir] == kindAbsent && !slices.Contains(j.Folders, dir) {
				j.Folders = append(j.Folders, dir)
			}
		}
	}
	slices.SortFunc(j.Folders, strings.Compare) // parents first
	for i, t := range s.Trees {
		if o.trees[i] == kindAbsent && !slices.Contains(j.Trees, t) {
			j.Trees = append(j.Trees, t)
		}
	}
	for i, u := range s.Units {
		if !slices.ContainsFunc(j.Units, func(r unitRecord) bool { return r.Name == u.Name }) {
			r := o.units[i]
			r.Name = u.Name
			j.Units = append(j.Units, r)
		}
	}
}

// parents are the folders above a file, the outermost first, without /.
func parents(file string) (out []string) {
	for dir := path.Dir(file); dir != "/" && dir != "."; dir = path.Dir(dir) {
		out = append(out, dir)
	}
	slices.Reverse(out)
	return out
}
