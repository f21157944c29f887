package machine

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// defaultMirror is public and has all Debian releases.
const defaultMirror = "http://deb.debian.org/debian"

// debianMirror returns the mirror that this computer's package manager uses for
// Debian itself, or the default one.
func debianMirror() string {
	var lists, sources []string
	for _, pattern := range []string{"/etc/apt/sources.list", "/etc/apt/sources.list.d/*.list", "/etc/apt/sources.list.d/*.sources"} {
		paths, err := filepath.Glob(pattern)
		if err != nil {
			continue
		}
		for _, p := range paths {
			b, err := os.ReadFile(p)
			if err != nil {
				continue
			}
			if strings.HasSuffix(p, ".sources") {
				sources = append(sources, string(b))
			} else {
				lists = append(lists, string(b))
			}
		}
	}
	return mirrorOf(lists, sources)
}

// mirrorOf finds the mirror in sources in one-line and in deb822 format.
func mirrorOf(lists, sources []string) string {
	for _, text := range sources {
		for paragraph := range strings.SplitSeq(text, "\n\n") {
			fields := map[string]string{}
			for line := range strings.Lines(paragraph) {
				if name, value, ok := strings.Cut(line, ":"); ok && !strings.HasPrefix(line, "#") {
					fields[strings.ToLower(name)] = value
				}
			}
			if strings.TrimSpace(fields["enabled"]) == "no" {
				continue
			}
			for _, uri := range strings.Fields(fields["uris"]) {
				if slices.Contains(strings.Fields(fields["types"]), "deb") && isDebian(uri, strings.Fields(fields["suites"]), strings.Fields(fields["components"])) {
					return uri
				}
			}
		}
	}
	for _, text := range lists {
		for line := range strings.Lines(text) {
			if i := strings.Index(line, "["); i >= 0 {
				if j := strings.Index(line, "]"); j > i {
					line = line[:i] + line[j+1:] // options
				}
			}
			f := strings.Fields(line)
			if len(f) >= 4 && f[0] == "deb" && isDebian(f[1], f[2:3], f[3:]) {
				return f[1]
			}
		}
	}
	return defaultMirror
}

// isDebian distinguishes a Debian mirror from other sources of packages: only
// Debian's own archives have suites with its names and a component main.
func isDebian(uri string, suites, components []string) bool {
	if !strings.HasPrefix(uri, "http://") && !strings.HasPrefix(uri, "https://") && !strings.HasPrefix(uri, "file:") {
		return false
	}
	names := []string{"bookworm", "trixie", "forky", "sid", "stable", "testing", "unstable"}
	return slices.Contains(components, "main") &&
		slices.ContainsFunc(suites, func(s string) bool { return slices.Contains(names, s) })
}

// aptProxy returns the proxy that apt is configured to use, if any.
func aptProxy(ctx context.Context) string {
	out, err := exec.CommandContext(ctx, "apt-config", "shell", "P", "Acquire::http::Proxy").Output()
	if err != nil {
		return "" // there is no apt
	}
	value := strings.TrimSpace(strings.TrimPrefix(strings.TrimSpace(string(out)), "P="))
	proxy := strings.Trim(value, "'\"")
	if proxy == "DIRECT" || strings.ContainsAny(proxy, "' \t\n") {
		return ""
	}
	return proxy
}
