//go:build tools

// Package tools pins the server that knows which requests Stripe's API allows.
package tools

import _ "github.com/stripe/stripe-mock"
