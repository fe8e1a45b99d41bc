module github.com/towpath/towpath-go

go 1.22
