package provenance

import (
	"debug/buildinfo"
	"os"
	"path/filepath"
)

// programNames are the names of this program's files in PATH.
var programNames = []string{"constellation", "constellation-sandbox", "kubectl-constellation"}

// Other is a program of another installation that PATH contains.
type Other struct {
	// Path is where PATH finds it, File the same without links.
	Path string `json:"path"`
	File string `json:"file"`
	// First reports that PATH finds it before that of this installation.
	First bool `json:"first"`
	// Commit and CommitTime are those that the file was built from; empty if it does not contain them.
	Commit     string `json:"commit,omitempty"`
	CommitTime string `json:"commitTime,omitempty"`
}

// Others lists the programs of other installations in the folders of PATH, in their order. dir is the
// folder of this installation, without links. It reads the programs and executes none of them.
func Others(dir string, path []string) (out []Other) {
	for _, name := range programNames {
		own := false
		seen := map[string]bool{}
		for _, folder := range path {
			if !filepath.IsAbs(folder) {
				continue // it depends on the working directory
			}
			p := filepath.Join(folder, name)
			file, err := filepath.EvalSymlinks(p)
			if err != nil {
				continue
			}
			if info, err := os.Stat(file); err != nil || !info.Mode().IsRegular() || info.Mode()&0o111 == 0 {
				continue
			}
			switch {
			case filepath.Dir(file) == dir:
				own = true
			case !seen[file]:
				seen[file] = true
				o := Other{Path: p, File: file, First: !own}
				if info, err := buildinfo.ReadFile(file); err == nil {
					b := BuildOf(info)
					o.Commit, o.CommitTime = b.Commit, b.CommitTime
				}
				out = append(out, o)
			}
		}
	}
	return out
}
