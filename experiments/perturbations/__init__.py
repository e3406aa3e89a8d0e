"""What changes in the user turn when the response, or the header, is changed?"""
