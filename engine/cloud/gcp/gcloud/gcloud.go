// Package gcloud reads what gcloud, the command line of Google Cloud, has on this computer.
package gcloud

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"constellation/engine/cloud"
	"constellation/engine/cloud/gcp/api"
)

// Found is what this computer knows of Google Cloud. Empty fields were not found.
type Found struct {
	// Credentials describes the default credentials, without secrets.
	Credentials string
	// Err is why they cannot be used, with its remedy. It wraps cloud.ErrDenied.
	Err           error
	Project, Zone string
}

// kinds are the types of default credentials
// (https://cloud.google.com/docs/authentication/application-default-credentials) in words.
var kinds = map[string]string{
	"authorized_user": "login of gcloud", "external_account": "workload identity federation", "external_account_authorized_user": "workforce identity federation",
	"impersonated_service_account": "impersonated service account", "service_account": "key of a service account",
}

// Find reads the default credentials, the settings of gcloud and the environment. It sends nothing, so credentials of
// a machine at Google are not found.
func Find() Found {
	home, _ := os.UserHomeDir() // without one, nothing is found
	usual := filepath.Join(home, ".config", "gcloud")
	settings := gcloudSettings(cmp.Or(os.Getenv("CLOUDSDK_CONFIG"), usual))
	f := Found{
		Project: cmp.Or(os.Getenv("GOOGLE_CLOUD_PROJECT"), os.Getenv("CLOUDSDK_CORE_PROJECT"), settings["core.project"]),
		Zone:    cmp.Or(os.Getenv("CLOUDSDK_COMPUTE_ZONE"), settings["compute.zone"]),
	}
	if region := cmp.Or(os.Getenv("CLOUDSDK_COMPUTE_REGION"), settings["compute.region"]); f.Zone == "" && region != "" {
		f.Zone = region + "-a" // nearly all regions have it; the form shows it
	}
	var adc struct {
		Type           string `json:"type"`
		QuotaProjectID string `json:"quota_project_id"`
		ProjectID      string `json:"project_id"`
	}
	b, err := os.ReadFile(cmp.Or(os.Getenv("GOOGLE_APPLICATION_CREDENTIALS"), filepath.Join(usual, "application_default_credentials.json")))
	if err == nil {
		err = json.Unmarshal(b, &adc)
	}
	if err != nil {
		f.Err = &api.Error{Op: "find credentials", Kind: cloud.ErrDenied, Message: "no login of gcloud was found on this computer", Remedy: api.NoCredentials}
		return f
	}
	f.Credentials = cmp.Or(kinds[adc.Type], "credentials")
	if account := settings["core.account"]; adc.Type == "authorized_user" && account != "" {
		f.Credentials += ", probably of " + account // the two commands of gcloud that log in need not agree
	}
	f.Project = cmp.Or(f.Project, adc.QuotaProjectID, adc.ProjectID)
	_, f.Err = api.Credentials()
	return f
}

var configurationRE = regexp.MustCompile(`^[a-z][-a-z0-9]*$`)

// gcloudSettings returns the settings of the active configuration of gcloud as section.key.
func gcloudSettings(dir string) map[string]string {
	name := os.Getenv("CLOUDSDK_ACTIVE_CONFIG_NAME")
	if b, err := os.ReadFile(filepath.Join(dir, "active_config")); name == "" && err == nil {
		name = strings.TrimSpace(string(b))
	}
	if name = cmp.Or(name, "default"); !configurationRE.MatchString(name) {
		return nil
	}
	b, err := os.ReadFile(filepath.Join(dir, "configurations", "config_"+name))
	if err != nil {
		return nil
	}
	out, part := map[string]string{}, ""
	for lines := bufio.NewScanner(bytes.NewReader(b)); lines.Scan(); {
		line := strings.TrimSpace(lines.Text())
		if strings.HasPrefix(line, "[") {
			part = strings.Trim(line, "[]")
			continue
		}
		if key, value, ok := strings.Cut(line, "="); ok && !strings.HasPrefix(line, "#") {
			out[part+"."+strings.TrimSpace(key)] = strings.TrimSpace(value)
		}
	}
	return out
}
