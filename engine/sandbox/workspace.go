package sandbox

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"constellation/engine"
	"constellation/engine/workspace"
)

// configSumName is the file with the digest of the configuration that Up wrote. With it, Down
// detects whether the user has edited the configuration.
const configSumName = "config.sha256"

func configSum(ws string) (string, error) {
	b, err := os.ReadFile(filepath.Join(ws, workspace.ConfigFile))
	if err != nil {
		return "", err
	}
	return digest(b), nil
}

func digest(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

// adopt writes the workspace files that describe its sandbox and returns the
// names of the written files. A configuration that matches the digest in sumFile is
// unedited and follows the sandbox. A configuration that the user has edited or made is
// kept: only its placeholders are filled in, and differs names the fields that do not
// match the sandbox.
func adopt(w string, info workspace.SandboxInfo, sumFile string) (written, differs []string, err error) {
	ws, err := workspace.OpenWorkspace(w)
	if err != nil {
		return nil, nil, err
	}
	written, err = ws.AdoptSandbox(info)
	if err != nil {
		return written, nil, err
	}
	if !slices.Contains(written, workspace.ConfigFile) {
		before, _ := os.ReadFile(sumFile)
		sum, err := configSum(w)
		if err != nil {
			return written, nil, fmt.Errorf("read configuration: %w", err)
		}
		if sum != strings.TrimSpace(string(before)) {
			filled, differs, err := ws.FillConfig(info)
			if len(filled) > 0 {
				written = append(written, workspace.ConfigFile)
			}
			return written, differs, err
		}
		b, err := workspace.GenerateConfig(info.Provider(), workspace.GenerateOptions{Sandbox: &info})
		if err != nil {
			return written, nil, err
		}
		if digest(b) == sum {
			return written, nil, nil
		}
		if err := ws.ReplaceConfig(b); err != nil {
			return written, nil, err
		}
		written = append(written, workspace.ConfigFile)
	}
	sum, err := configSum(w)
	if err != nil {
		return written, nil, fmt.Errorf("read configuration: %w", err)
	}
	if err := writeFile(sumFile, []byte(sum+"\n"), 0o600); err != nil {
		return written, nil, fmt.Errorf("remember configuration: %w", err)
	}
	return written, nil, nil
}

// forget removes from a workspace the files that describe a sandbox, of which name, UID and cloud are known, and its
// cluster, which are useless once the sandbox is gone: state, kubeconfig, master
// secret, and the configuration if it is as Up wrote it.
// Files of another sandbox, or of anything else, are left alone. With an empty uid
// it accepts any sandbox of that name whose own directory is gone. It returns the names
// of the removed files, and whether an edited configuration stays.
func forget(w string, info workspace.SandboxInfo, configSHA256 string) (removed []string, kept bool, err error) {
	ws, err := workspace.OpenWorkspace(w)
	if err != nil {
		if _, gone := os.Stat(w); errors.Is(gone, fs.ErrNotExist) {
			return nil, false, nil
		}
		return nil, false, err
	}
	st, err := ws.State()
	if err != nil {
		// The file is absent, or unreadable and so left to the user.
		return nil, false, nil
	}
	have := st.Infrastructure
	if info.UID == "" { // only the state of the workspace has the cloud of the sandbox
		info.Cloud = have.Provider
	}
	if !info.Has(st) || info.UID != "" && have.UID != info.UID {
		return nil, false, nil
	}
	if _, err := os.Lstat(filepath.Dir(have.Section.Text("socket"))); info.UID == "" && err == nil {
		// It belongs to another state directory than the one in use.
		return nil, false, fmt.Errorf("sandbox %s lives in %s: set XDG_STATE_HOME as it was when it was started", info.Name, filepath.Dir(have.Section.Text("socket")))
	}
	sum, err := configSum(w)
	hasConfig := err == nil
	// The state goes last: while it exists, a repeated Down finds the other files.
	files := []string{workspace.KubeconfigFile, "." + workspace.KubeconfigFile + ".pending", workspace.MasterSecretFile, engine.TargetFile, workspace.StateFile}
	if hasConfig && sum == configSHA256 {
		files = append([]string{workspace.ConfigFile}, files...)
	}
	for _, f := range files {
		err := os.Remove(ws.Path(f))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return removed, false, fmt.Errorf("remove files of the workspace: %w", err)
		}
		removed = append(removed, f)
	}
	return removed, hasConfig && sum != configSHA256, nil
}

// forgetTold calls forget and reports the outcome to the user.
func forgetTold(t *teller, ws string, info workspace.SandboxInfo, configSHA256 string) error {
	removed, kept, err := forget(ws, info, configSHA256)
	if len(removed) > 0 {
		t.progress(stepClean, "removed "+strings.Join(removed, ", "), 0, 0)
	}
	if kept {
		t.warn(stepClean, workspace.ConfigFile+" was edited and stays; its measurements and trust roots are those of the sandbox that is gone")
	}
	return err
}
