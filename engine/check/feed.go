package check

import (
	"errors"
	"regexp"
	"slices"
	"strings"
	"time"

	"constellation/engine/release"
	"constellation/engine/workspace"
)

// VerifyCommand is the command that verifies every file of a feed with the same keys.
func VerifyCommand(location string, keys []release.Key) string {
	command := "`constellation release verify " + ShellQuote(location)
	var files []string
	configured := false
	for _, k := range keys {
		if k.File == "" {
			configured = k.Name == workspace.ConfigFile
		} else if !slices.Contains(files, k.File) {
			files = append(files, k.File)
		}
	}
	if configured {
		return "copy releases.keys of " + workspace.ConfigFile + " into a file feed.pub: then " + command + " --feed-key feed.pub`"
	}
	for _, f := range files {
		command += " --feed-key " + ShellQuote(f)
	}
	return command + "`"
}

const feedAddresses = "a feed is at an https address, at an http address of this computer, or in a folder"

// FeedRemedy is the remedy for a feed that fails verification.
func FeedRemedy(err error) string {
	if err == nil {
		return ""
	}
	for _, r := range []struct {
		is     error
		remedy string
	}{
		{release.ErrAddress, feedAddresses},
		{release.ErrNoKeys, "pass the publisher's public key with --feed-key FILE; no feed is official yet"},
		{release.ErrConflict, "ask its publisher: a release never changes, so one of the two is not genuine"},
		{release.ErrRedirect, "name the address that it leads to, if you trust it"},
		{release.ErrExpired, "check this computer's clock; if it is right, ask the publisher for a new publication"},
		{release.ErrFuture, "check this computer's clock; if it is right, ask the publisher"},
		{release.ErrLegacy, "ask the publisher for the root of the feed, and pass its file root.json with --feed-key"},
		{release.ErrRoot, "compare the root that you trust with that of the publisher; do not use the feed until you are sure"},
		{release.ErrUnsigned, "ask the publisher for the root of the feed; do not use the feed until you are sure"},
		{release.ErrRollback, "try again later: an old copy was served; if that goes on, ask the publisher"},
		{release.ErrSigner, "if the publisher has another key, pass its file with --feed-key (or add it to releases.keys); otherwise the file was altered: retry in a minute, in case it was being published, then contact the publisher"},
		{release.ErrUntrusted, "ask the publisher for the key that is used now; do not use the feed until you are sure"},
		{release.ErrAltered, "try again in a minute, in case it was being published; then ask the publisher"},
		{release.ErrUnreachable, "check the address and the network, and try again; " + feedAddresses},
		{release.ErrAbsent, "name the folder that holds index.json; `constellation release build` makes one"},
	} {
		if errors.Is(err, r.is) {
			return r.remedy
		}
	}
	return ""
}

// FeedLimit is the timeout for reading a feed.
const FeedLimit = 10 * time.Second

var plainRE = regexp.MustCompile(`^[A-Za-z0-9_@%+=:,./-]+$`)

// ShellQuote quotes an argument for a POSIX shell, if it needs that.
func ShellQuote(s string) string {
	if plainRE.MatchString(s) {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}
