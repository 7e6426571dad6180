//go:build tools

// Package tools pins the NSQ daemons of the sandbox. A plain `go install` of
// them cannot work: NSQ's own go.mod carries a replace line, which Go only
// honours in the main module, so this module repeats it.
package tools

import (
	_ "github.com/nsqio/nsq/apps/nsqd"
	_ "github.com/nsqio/nsq/apps/nsqlookupd"
)
