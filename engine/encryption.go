package engine

import (
	"fmt"

	"constellation/assets"
	"constellation/bootstrapper/initproto"
	"constellation/engine/cloud/providers"
	"constellation/engine/kms"
	"constellation/engine/plan"
	"constellation/engine/release"
	"constellation/engine/workspace"
)

// encrypts reports whether the cluster that init makes encrypts Secrets in etcd.
func (i *initRun) encrypts(r *plan.Reporter) (bool, error) {
	from, _ := providers.Named(i.state.Infrastructure.Provider)
	if wanted := i.config.EncryptSecrets; !from.SealsKeys || wanted != nil && !*wanted {
		return false, nil
	}
	for _, c := range i.release.Charts {
		if c.Source != "" || !i.serves(c.Name, release.JoinService) {
			continue
		}
		files, err := assets.ChartFor(c.Name, i.release.Version.String())
		if err != nil {
			return false, err
		}
		if assets.HasValue(files, "joinservice", "kms") {
			return true, nil
		}
	}
	// Without keys, further control planes could not serve Secrets.
	r.Log("engine", "", "warn", fmt.Sprintf("Secrets are stored in etcd without encryption: the join service of release %s hands no keys over", i.release.Version))
	return false, nil
}

// firstKMSKeys returns the keys of a new cluster. One with the master secret of a lost cluster gets the same keys.
func firstKMSKeys(m workspace.MasterSecret) ([]byte, error) {
	k, err := kms.First(m.KMSSecret(), max(m.KMS, 1))
	if err != nil {
		return nil, err
	}
	return k.Encode()
}

// storeEncryption records whether the first node encrypts Secrets, which all control planes then have to.
func (i *initRun) storeEncryption(r *plan.Reporter, s *initproto.Success) error {
	if len(i.kmsKeys) > 0 && !s.EncryptsSecrets {
		r.Log("engine", s.NodeName, "warn", "Secrets are stored in etcd without encryption: the image of the machine has no key service")
	}
	v := &i.state.ClusterValues
	if v.EncryptsSecrets == s.EncryptsSecrets {
		return nil
	}
	v.EncryptsSecrets = s.EncryptsSecrets
	return i.e.ws.WriteState(i.state)
}
